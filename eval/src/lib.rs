//! Propose, verify, measure: acceptance of a drafter on its target.
//!
//! [`decode::decode`] runs real speculative decoding with any [`propose::Proposer`] under any
//! [`verify::VerifyRule`]; [`exact::exact`] computes the expected rounds on given text without
//! decoding; [`suite::run`] fills a [`report::Report`] over prompt suites, temperatures and proposers.

pub mod acceptance;
pub mod bootstrap;
pub mod calibration;
mod category;
pub mod compare;
pub mod config;
pub mod decode;
pub mod enumeration;
pub mod error;
pub mod exact;
pub mod html;
pub mod lossless;
mod one_or_more;
pub mod parts;
pub mod picture;
mod produced;
pub mod propose;
pub mod report;
pub mod roofline;
pub mod round_dp;
pub mod suite;
pub mod surprise;
pub mod table;
pub mod verify;

pub use one_or_more::OneOrMore;
