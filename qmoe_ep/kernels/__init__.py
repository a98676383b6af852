"""Device code (``.cu``, ``.cuh``) beside the Python that describes and sizes its launches."""
