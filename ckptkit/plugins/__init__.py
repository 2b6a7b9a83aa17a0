"""Plugins: optional formats, model families and commands, one folder or file each.

The core finds plugins through tables (formats, model families, commands and others), and other packages can add lines
to these tables with entry points. A plugin may import the core, but never another plugin.
"""
