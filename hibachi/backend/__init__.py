"""What an array library must be able to do: the backend contract, its derivation from the array API, discovery."""
