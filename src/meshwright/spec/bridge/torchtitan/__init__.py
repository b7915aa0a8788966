"""torchtitan: TOML job files."""

from meshwright.spec.bridge.torchtitan.job import export, import_

__all__ = ["export", "import_"]
