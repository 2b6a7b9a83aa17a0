"""The version of ckptkit."""

__version__ = "0.1.0"
