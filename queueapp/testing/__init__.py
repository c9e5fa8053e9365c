"""What third parties test their own code with. Nothing of it is imported by the app itself."""
