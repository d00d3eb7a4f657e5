"""Reports of studies and campaigns: numbers first (``data``), pictures second (``plots``), pages last."""
