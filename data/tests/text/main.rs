//! Text to data set: reading, templates, turn marks, the data set on disk.

mod dataset;
mod fixture;
mod marks;
mod reading;
mod real_data;
mod templates;
