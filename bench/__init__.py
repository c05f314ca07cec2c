"""What measures. Importing it pins BLAS, which must happen before torch loads, as the services do."""

import os

from hedgerow.model.blas import pin_blas

pin_blas(os.environ)
