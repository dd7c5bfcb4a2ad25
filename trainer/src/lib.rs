//! Objective, optimizer, step loop, checkpoints and logs.
