"""The blocks of other libraries whose residual path is known, and its exchange for one of ours."""
