"""The one thing setup.cfg cannot say: an optional native part, without which the package installs and works too."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "trtllm_pp_progress.native.understudy",
            ["trtllm_pp_progress/native/understudy.c"],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,  # loaded by ctypes, it uses no Python at all: one build serves every version
            optional=True,
        )
    ]
)
