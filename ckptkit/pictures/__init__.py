"""Pictures: layouts and numbers as text for a terminal, as SVG and as a page. Opens no file and writes none."""
