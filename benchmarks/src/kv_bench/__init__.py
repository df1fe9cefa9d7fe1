"""Tasks, metrics and plots for the methods of kv-integration."""

__version__ = "0.1.0"

__all__: list[str] = []
