"""Weight iterators: `(name, tensor)` out of lists of files, in one order, whichever library reads them."""
