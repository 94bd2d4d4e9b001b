"""Scripts that measure hibachi; README.md lists them."""
