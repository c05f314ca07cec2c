"""`hedgerow eval`: small coding tasks, answered by whatever serves, judged in a sandbox."""
