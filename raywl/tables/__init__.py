"""Tables of rows in chunks of plain bytes: cut, measured, and (in `rows`) gathered from. Knows nothing of Ray."""

from raywl.tables.layout import PlasmaBudget, TableLayout

__all__ = ["PlasmaBudget", "TableLayout"]
