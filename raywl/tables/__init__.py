"""Tables of rows in chunks of plain bytes: cut, measured, and gathered from. Knows nothing of Ray."""

from raywl.tables.layout import PlasmaBudget, TableLayout
from raywl.tables.rows import RowReader

__all__ = ["PlasmaBudget", "RowReader", "TableLayout"]
