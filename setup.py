"""What setup.cfg cannot say: a .pth file in site-packages, and an optional native part."""

from pathlib import Path

from setuptools import Extension, setup
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


setup(
    cmdclass={"build_py": BuildWithPth},
    ext_modules=[
        Extension(
            "trtllm_pp_progress.native.understudy",
            ["trtllm_pp_progress/native/understudy.c"],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,  # loaded by ctypes, it uses no Python at all: one build serves every version
            optional=True,
        )
    ],
)
