"""Small weights shipped with the package, and the scripts that made them."""
