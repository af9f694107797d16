"""Starting a run on the hosts of a hostfile."""
