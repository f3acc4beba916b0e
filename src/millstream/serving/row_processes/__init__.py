"""Several server processes on one port: the first answers every request, the others take rows and forward the rest."""
