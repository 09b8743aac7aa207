"""The source distribution keeps ``pensieve/kernels`` and ``pensieve/store`` as the links that they are.

setuptools would pack what lies behind a link a second time; the unpacked tree would be another one than the checkout,
and its tests would fail. ``pyproject.toml`` names this class; it is no part of the wheel.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools.command.sdist import sdist

LINKS = ("pensieve/kernels", "pensieve/store")


class LinkedSdist(sdist):
    """``sdist`` with the package's links made again in the tree that is packed; MANIFEST.in leaves their files out."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for link in LINKS:
            os.symlink(os.readlink(link), Path(base_dir) / link)
