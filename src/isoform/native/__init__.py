"""A step of one token a row as machine code, made on the machine it runs on; never needed for a result."""

from isoform.native.library import Library, built, library, loaded, switched_off

__all__ = ["Library", "built", "library", "loaded", "switched_off"]
