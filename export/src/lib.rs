//! Our checkpoints to and from the layouts that serving engines load.
