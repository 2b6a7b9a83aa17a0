"""What ckptkit can do beyond its core, a folder or file each. The core reaches a plugin only through a line in a table.

The tables are those that other packages add lines to by entry points: formats, families of names, commands and others.
A plugin may import the core, and never another plugin.
"""
