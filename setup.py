"""What setup.cfg cannot say: a .pth file in site-packages, and an optional native part."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """Put the .pth where site looks for it: at the top of the wheel, of an editable one too."""

    PTH = "trtllm_pp_progress.pth"

    def run(self):
        """Build the modules, then copy the .pth."""
        super().run()
        self.copy_file(self.PTH, str(self._target()), preserve_mode=False)

    def get_outputs(self, include_bytecode=1):
        """List what run() has made."""
        return [*super().get_outputs(include_bytecode), str(self._target())]

    def _target(self):
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        return Path(folder) / self.PTH


# The native part is loaded by ctypes and uses no Python at all, so one build serves every Python, free-threaded or not:
# neither its name nor the wheel's says a version. (abi3 would: free-threaded Pythons before 3.15 refuse it.)


class BuildPlainLibrary(build_ext):
    """Name the library as no Python's extension module."""

    def get_ext_filename(self, fullname):
        """Return its path in the package."""
        return f"{fullname.replace('.', '/')}.so"


class WheelOfAnyPython(bdist_wheel):
    """Tag the wheel with its platform alone."""

    def get_tag(self):
        """Return the Pythons, the ABI and the platform it is for."""
        return ("py3", "none", super().get_tag()[2])


setup(
    cmdclass={"build_py": BuildWithPth, "build_ext": BuildPlainLibrary, "bdist_wheel": WheelOfAnyPython},
    ext_modules=[
        Extension(
            "trtllm_pp_progress.driver.native_thread",
            ["trtllm_pp_progress/driver/native_thread.c"],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
