"""The version, on the ground floor: everybody may say it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
