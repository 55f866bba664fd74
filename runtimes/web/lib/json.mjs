/** JSON as this format wants it: no key twice in one object, and nothing nested so deep that it could exhaust a stack. */

const DEEPEST = 32;

/**
 * Parses a text.
 * @param {string} text
 * @returns {unknown}
 * @throws {SyntaxError} it is not JSON, has a key twice, or is nested too deep
 */
export function parseStrict(text) {
  const data = JSON.parse(text); // from here on the text is known to be well-formed
  /** @type {(Set<string> | null)[]} keys so far of each object that is open; null for an array */
  const open = [];
  let wantsKey = false;
  for (let at = 0; at < text.length; at++) {
    const c = text[at];
    if (c === '"') {
      const begin = at++;
      while (text[at] !== '"') at += text[at] === '\\' ? 2 : 1;
      if (!wantsKey) continue;
      const key = JSON.parse(text.slice(begin, at + 1));
      const keys = /** @type {Set<string>} */ (open[open.length - 1]);
      if (keys.has(key)) throw new SyntaxError(`has the key ${JSON.stringify(key).slice(0, 60)} twice`);
      keys.add(key);
      wantsKey = false;
    } else if (c === '{' || c === '[') {
      open.push(c === '{' ? new Set() : null);
      wantsKey = c === '{';
      if (open.length > DEEPEST) throw new SyntaxError(`has values in more than ${DEEPEST} others`);
    } else if (c === '}' || c === ']') {
      open.pop();
      wantsKey = false;
    } else if (c === ',') {
      wantsKey = open[open.length - 1] !== null;
    }
  }
  return data;
}
