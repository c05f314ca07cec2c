"""The bundled models, and the code that trained them (`models.train`)."""
