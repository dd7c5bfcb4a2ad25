//! `strftime_now`, for templates that print the day they are rendered on.
//!
//! The time is UTC. A template that prints it makes other tokens every day; most such templates also read
//! an option (often `date_string`) that fixes it.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// The present time in the words of `strftime`.
pub(super) fn now(format: &str) -> Result<String, Error> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    render(format, since.map_or(0, |elapsed| elapsed.as_secs()))
}

fn render(format: &str, seconds: u64) -> Result<String, Error> {
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute) = (seconds / 3600 % 24, seconds / 60 % 60);
    let month_name = MONTHS[month as usize - 1];
    let weekday = WEEKDAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let field = match letters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => format!("{hour:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{:02}", seconds % 60),
            Some('%') => "%".to_owned(),
            other => {
                let other = other.map_or_else(String::new, String::from);
                let message = format!("`strftime_now` does not know `%{other}`");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        out.push_str(&field);
    }
    Ok(out)
}

/// Year, month and day of a number of days since 1970-01-01 in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut rest = days;
    let mut year = 1970;
    while rest >= year_len(year) {
        rest -= year_len(year);
        year += 1;
    }
    let mut month = 1;
    while rest >= month_len(year, month) {
        rest -= month_len(year, month);
        month += 1;
    }
    (year, month, rest + 1)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn year_len(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn month_len(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_have_their_names() {
        // Seconds from Python's `calendar.timegm`; 2024-02-29 was a Thursday.
        assert_eq!(render("%d %b %Y", 0).unwrap(), "01 Jan 1970");
        assert_eq!(
            render("%A %a %Y-%m-%d %H:%M:%S %B %y %%", 1_709_210_096).unwrap(),
            "Thursday Thu 2024-02-29 12:34:56 February 24 %"
        );
        assert!(render("%Q", 0).is_err());
    }
}
