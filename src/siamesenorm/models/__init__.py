"""Model families; the residual path of each is a topology's."""
