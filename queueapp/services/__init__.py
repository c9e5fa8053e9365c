"""What any process that receives for long has, whatever runs its handlers: it says that it lives, hears wake-ups, dispatches and
keeps house. No process tree, no receive task."""
