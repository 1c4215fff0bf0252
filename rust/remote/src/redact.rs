//! Removes credentials from texts that people read: messages, logs and reports.

/// Characters that end a URL within a text.
const ENDS: [char; 8] = [' ', '\t', '\n', '\r', '"', '\'', '<', '>'];

/// The text without credentials in its URLs: nothing between `://` and the last `@` of a URL, and nothing behind a `?`,
/// where a signature may be. A path of `file://` may have both characters.
pub(crate) fn redacted(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (scheme, url) = rest.split_at(at + "://".len());
        let end = url.find(ENDS).unwrap_or(url.len());
        shown += scheme;
        shown += &without_credentials(&url[..end], scheme.ends_with("file://"));
        rest = &url[end..];
    }
    shown + rest
}

/// A value that should be a URL, for a message. It may have any characters, and no scheme.
pub(crate) fn redacted_url(value: &str) -> String {
    match value.split_once("://") {
        Some((scheme, rest)) => {
            let scheme = &scheme[scheme.rfind('@').map_or(0, |at| at + 1)..];
            format!("{scheme}://{}", without_credentials(rest, scheme == "file"))
        }
        None => without_credentials(value, false),
    }
}

fn without_credentials(rest: &str, is_file: bool) -> String {
    // A directory is named after the first slash. In other URLs a secret with a slash may stand before the last `@`.
    let searched = match is_file {
        true => rest.split('/').next().unwrap_or_default(),
        false => rest,
    };
    let shown = match searched.rfind('@') {
        Some(at) => &format!("...{}", &rest[at..]),
        None => rest,
    };
    match shown.split_once('?') {
        Some((place, _)) if !is_file => format!("{place}?..."),
        _ => shown.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_in_the_urls_of_a_text_are_not_shown() {
        for (text, shown) in [
            ("no URL", "no URL"),
            ("https://host/a", "https://host/a"),
            ("at https://u:s@host/a: no", "at https://...@host/a: no"),
            ("https://u:a/b@c/d@host", "https://...@host"),
            ("(https://host/a?sig=s)", "(https://host/a?..."),
            (
                "\"redis://:s@h\" and http://x@y",
                "\"redis://...@h\" and http://...@y",
            ),
            ("file:///a@b?c", "file:///a@b?c"),
            ("file://u:s@h/a", "file://...@h/a"),
            ("://@", "://...@"),
        ] {
            assert_eq!(redacted(text), shown);
        }
    }

    #[test]
    fn credentials_in_a_value_that_is_no_url_are_not_shown() {
        for (value, shown) in [
            ("u:s@host", "...@host"),
            ("u:s p@host", "...@host"),
            ("s3://u:s p\n@host", "s3://...@host"),
            ("u:s@x://host", "x://host"),
            ("", ""),
        ] {
            assert_eq!(redacted_url(value), shown);
        }
    }
}
