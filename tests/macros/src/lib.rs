//! The attribute that registers an end-to-end test with `fdmap_tests::harness`.

#![forbid(unsafe_code)]

use proc_macro::{TokenStream, TokenTree};

/// Registers a function as an end-to-end test. Files import it under the name of the built-in attribute, which it replaces:
///
/// ```ignore
/// use fdmap_tests::test;
///
/// #[test]
/// fn swapped_page_reports_its_slot() {}
///
/// #[test(flavor = "multi_thread")]
/// async fn idle_checkpoint_closes_no_generation() {}
/// ```
///
/// An `async` function runs on a new tokio runtime, on the test's thread only unless `flavor` specifies another one.
#[proc_macro_attribute]
pub fn test(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let mut tokens = item.clone().into_iter();
    let before_name: Vec<_> = tokens.by_ref().take_while(|token| !is_word(token, "fn")).collect();
    let Some(TokenTree::Ident(name)) = tokens.next() else {
        return error("#[test] registers functions only");
    };
    let multi_thread = match arguments.to_string().as_str() {
        "" => false,
        r#"flavor = "multi_thread""# => true,
        other => return error(&format!("unknown arguments of #[test]: {other}")),
    };
    let is_async = before_name.iter().any(|token| is_word(token, "async"));
    let run = match (is_async, multi_thread) {
        (true, _) => format!("|| ::fdmap_tests::harness::block_on({name}(), {multi_thread})"),
        (false, false) => name.to_string(),
        (false, true) => return error("`flavor` is for async tests"),
    };
    let registration = format!(
        "::fdmap_tests::harness::inventory::submit! {{ ::fdmap_tests::harness::EndToEndTest {{ \
            path: ::core::concat!(::core::module_path!(), \"::{name}\"), run: {run} }} }}"
    );
    let Ok(registration) = registration.parse::<TokenStream>() else {
        return error("the registration does not parse");
    };
    item.into_iter().chain(registration).collect()
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident.to_string() == word)
}

fn error(message: &str) -> TokenStream {
    format!("::core::compile_error!({message:?});").parse().unwrap_or_default()
}
