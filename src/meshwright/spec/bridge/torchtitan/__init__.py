"""torchtitan: TOML job files."""

from meshwright.spec.bridge.torchtitan.job_config import export_config, import_config

__all__ = ["export_config", "import_config"]
