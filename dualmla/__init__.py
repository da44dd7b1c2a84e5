"""One MLA backend interface with two implementations: AITER for production, Triton as oracle and fallback.

Importing this package needs torch alone, touches no device and reads no environment variable.
"""

from dualmla.config import MLAConfig

__version__ = "0.1.0"

__all__ = ["MLAConfig"]
