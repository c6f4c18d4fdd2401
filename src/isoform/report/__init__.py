"""Rendering, from plain values: terminal, figures, one-file HTML. Heavy libraries load when used."""
