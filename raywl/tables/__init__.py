"""Tables of rows in chunks of plain bytes, without Ray: their layout here, gathering rows in `rows`."""

from raywl.tables.layout import PlasmaBudget, TableLayout

__all__ = ["PlasmaBudget", "TableLayout"]
