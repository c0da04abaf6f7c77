//! Durations and sizes as people write them.

use std::time::Duration;

/// A duration like `500ms`, `30s`, `5m`, `2h` or `1d`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text)?;
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "" => return Err(format!("`{text}` has no unit: write {text}s or {text}ms")),
        _ => return Err(format!("unknown unit `{unit}`: use ms, s, m, h or d")),
    };
    number
        .checked_mul(unit_ms)
        .map(Duration::from_millis)
        .ok_or_else(|| format!("`{text}` is too long"))
}

/// A size like `4096`, `64KiB`, `1MiB` or `2GB`, in bytes.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let unit_bytes = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => {
            return Err(format!(
                "unknown unit `{unit}`: use B, KiB, MiB, GiB or TiB"
            ));
        }
    };
    number
        .checked_mul(unit_bytes)
        .ok_or_else(|| format!("`{text}` is too large"))
}

fn split(text: &str) -> Result<(u64, &str), String> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(format!("`{text}` does not begin with a whole number"));
    }
    let number = number
        .parse()
        .map_err(|_| format!("`{number}` is too large"))?;
    Ok((number, unit.trim_start()))
}

/// A size for people.
pub(super) fn show_size(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] = [
        (1 << 40, "TiB"),
        (1 << 30, "GiB"),
        (1 << 20, "MiB"),
        (1 << 10, "KiB"),
    ];
    for (unit_bytes, unit) in UNITS {
        if bytes >= unit_bytes {
            let exact = bytes.is_multiple_of(unit_bytes);
            let decimals = usize::from(!exact);
            return format!("{:.*} {unit}", decimals, bytes as f64 / unit_bytes as f64);
        }
    }
    format!("{bytes} B")
}

/// A duration for people.
pub(super) fn show_duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds < 1e-3 {
        format!("{:.1} µs", seconds * 1e6)
    } else if seconds < 1.0 {
        format!("{:.1} ms", seconds * 1e3)
    } else if seconds < 120.0 {
        format!("{seconds:.1} s")
    } else if seconds < 7200.0 {
        format!("{:.0} min", seconds / 60.0)
    } else if seconds < 172_800.0 {
        format!("{:.1} h", seconds / 3600.0)
    } else {
        format!("{:.1} days", seconds / 86_400.0)
    }
}

/// A number for people: with commas.
pub(super) fn show_count(count: u64) -> String {
    let digits = count.to_string();
    let mut shown = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        for wrong in [
            "",
            "s",
            "5",
            "5x",
            "-5s",
            "1.5s",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_bytes_unless_they_say_otherwise() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64KiB"), Ok(65_536));
        assert_eq!(size("1 MiB"), Ok(1 << 20));
        assert_eq!(size("2GB"), Ok(2_000_000_000));
        for wrong in ["", "KiB", "1.5MiB", "1 apple", "99999999999TiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_people_read_is_short() {
        assert_eq!(show_size(15 * 1024), "15 KiB");
        assert_eq!(show_size(1536), "1.5 KiB");
        assert_eq!(show_size(7), "7 B");
        assert_eq!(show_count(1_234_567), "1,234,567");
        assert_eq!(show_count(12), "12");
        assert_eq!(show_duration(Duration::from_micros(12)), "12.0 µs");
        assert_eq!(show_duration(Duration::from_secs(30)), "30.0 s");
    }
}
