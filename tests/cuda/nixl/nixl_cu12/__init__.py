"""In the place of the real package: see ``nixl_double``."""
