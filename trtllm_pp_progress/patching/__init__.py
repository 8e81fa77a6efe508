"""Replace attributes of classes, modules and objects, and put them back by identity."""
