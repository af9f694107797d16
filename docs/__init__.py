"""Programs that write pages, tables and pictures of the documentation. They run from the root of the repository: python -m docs.NAME."""
