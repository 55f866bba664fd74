"""Fewer bits for a bundle's weights: formats, which weight gets which, graphs that read them. Nothing here needs torch."""
