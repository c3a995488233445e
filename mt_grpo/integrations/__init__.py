"""What people bring: environments, tools, rewards and agents in the form of other libraries, a file or folder each."""
