//! Propose, verify, measure: acceptance of a drafter on its target.
