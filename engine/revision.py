"""Which texts this engine gives."""

# Rises with every change after which a row may get another text: kernels, sampling, tokenizers,
# templates. A job that began with one revision does not go on with another.
NUMERICS_REVISION = 2
