//! Tickets: what does not parse is refused, the rest is the same after writing and reading.
#![no_main]

use lockset::Ticket;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(ticket) = text.parse::<Ticket>() {
        let again: Ticket = ticket.to_string().parse().expect("it is read as it was written");
        assert_eq!(again.to_string(), ticket.to_string());
    }
});
