"""Other projects' names over instep's core: change an import, keep the code."""
