"""What this machine is fit for, and the command that puts right what is not."""
