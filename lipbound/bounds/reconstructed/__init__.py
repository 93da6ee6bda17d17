"""Papers whose statements are known from code or memory alone, in the form that we can prove, one
file each."""
