//! Finds the address of the kernel's `swap_info`, an array of pointers to swap areas. Pure.
//!
//! The address is in the text of functions that read the array by swap type: those that list `/proc/swaps`, which an open file of it
//! refers to, and others, where the process may see the kernel's addresses. There, the address of the array itself is known, too, with
//! `CONFIG_KALLSYMS_ALL`. The entries of the array are compared with `/proc/swaps` whenever they are used.

/// Kernel data and functions that are looked for by name, as far as the process may see addresses.
pub(super) const NAMES: [&str; 3] = ["swap_info", "get_swap_device", "__swap_duplicate"];
/// Functions that an open `/proc/swaps` refers to.
pub(super) const OPERATIONS: usize = 2;

/// Functions that must agree.
const MIN_AGREEING: usize = 2;

/// The address of `swap_info`, from its symbol if there is one, else from the text of functions.
pub(super) fn swap_info(symbol: Option<u64>, texts: &[&[u8]]) -> Result<u64, String> {
    if let Some(address) = symbol {
        return Ok(address);
    }
    let found: Vec<u64> = texts.iter().filter_map(|text| array_read(text)).collect();
    let votes = |address: u64| found.iter().filter(|one| **one == address).count();
    let best = found.iter().copied().max_by_key(|address| votes(*address));
    match best {
        Some(address) if votes(address) >= MIN_AGREEING && votes(address) * 2 > found.len() => Ok(address),
        _ => Err(format!(
            "the address of the kernel's swap_info is unknown: {} of {} functions read an array, and no {MIN_AGREEING} of them \
             agree",
            found.len(),
            texts.len()
        )),
    }
}

/// The array of the first `mov disp32(,%reg,8),%r64` in x86-64 code: REX.W, opcode 8B, ModRM with a SIB byte, SIB with scale 8 and no
/// base. The displacement is sign-extended: the kernel's data is in the last 2 GiB of the address space.
fn array_read(text: &[u8]) -> Option<u64> {
    text.windows(8).find_map(|code| {
        let [rex, opcode, modrm, sib, disp @ ..] = code else { return None };
        let is_read = rex & 0xf8 == 0x48 && *opcode == 0x8b && modrm & 0xc7 == 0x04 && sib & 0xc7 == 0xc5;
        let disp = i32::from_le_bytes(disp.try_into().ok()?);
        is_read.then(|| i64::from(disp).cast_unsigned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: u64 = 0xffff_ffff_8312_4560;

    /// `push %rbx; mov array(,%rdi,8),%rax`
    fn function(array: u64) -> Vec<u8> {
        let disp = array.to_le_bytes();
        [&[0x53, 0x48, 0x8b, 0x04, 0xfd][..], &disp[..4], &[0xc3]].concat()
    }

    #[test]
    fn read_of_an_array_by_index_is_found() {
        assert_eq!(array_read(&function(ADDRESS)), Some(ADDRESS));
        // `mov array(,%r12,8),%rbx`
        let code = [0x4a, 0x8b, 0x1c, 0xe5, 0x60, 0x45, 0x12, 0x83];
        assert_eq!(array_read(&code), Some(ADDRESS));
        // A 32-bit load, a base register, scale 4, and the end of the text.
        for code in [
            &[0x8b, 0x04, 0xfd, 0x60, 0x45, 0x12, 0x83, 0x90][..],
            &[0x48, 0x8b, 0x04, 0xf8, 0x60, 0x45, 0x12, 0x83],
            &[0x48, 0x8b, 0x04, 0xbd, 0x60, 0x45, 0x12, 0x83],
            &function(ADDRESS)[..8],
            &[],
        ] {
            assert_eq!(array_read(code), None, "{code:x?}");
        }
    }

    #[test]
    fn address_is_that_of_the_symbol_or_of_agreeing_functions() {
        let [one, two, other] = [function(ADDRESS), function(ADDRESS), function(ADDRESS + 64)];
        assert_eq!(swap_info(Some(5), &[&one, &two]), Ok(5));
        assert_eq!(swap_info(None, &[&one, &two]), Ok(ADDRESS));
        assert_eq!(swap_info(None, &[&other, &one, &[], &two]), Ok(ADDRESS));
        assert!(swap_info(None, &[]).is_err());
        assert!(swap_info(None, &[&one, &[]]).is_err());
        assert!(swap_info(None, &[&one, &two, &other, &other]).is_err());
    }
}
