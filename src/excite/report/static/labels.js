// Text of numbers, ticks and names for the charts. Nothing here touches the page.
"use strict";
window.ExciteLabels = (() => {
  const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const power = (n) => "10" + [...String(n)].map((c) => SUPERSCRIPT[c]).join("");

  // At most `digits` significant digits; powers of ten for very small and very large numbers.
  function number(value, { digits = 4, percent = false } = {}) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "not finite";
    if (percent) return `${Number((100 * value).toPrecision(digits - 1))}%`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
      const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
      const short = String(Number(mantissa));
      return short === "1" ? power(Number(exponent)) : `${short}·${power(Number(exponent))}`;
    }
    return Number(value.toPrecision(Math.max(digits, size >= 1 ? Math.ceil(Math.log10(size + 1)) : 0))).toLocaleString("en-US", { maximumFractionDigits: 12 });
  }

  // Ticks of a linear axis at multiples of 1, 2 or 5 times a power of ten: about `count` of them.
  function linearTicks(low, high, count, whole = false) {
    const rough = (high - low) / Math.max(count, 1);
    if (!(rough > 0) || !Number.isFinite(rough)) return [];
    const unit = 10 ** Math.floor(Math.log10(rough));
    let step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999);
    if (whole) step = Math.max(1, Math.round(step));
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 100; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  // Ticks of a logarithmic axis: powers of ten, every so many that at most `count` remain; 1, 2 and 5 within a few decades.
  function logTicks(low, high, count) {
    const [first, last] = [Math.log10(low), Math.log10(high)];
    const stride = Math.max(1, Math.ceil((last - first) / Math.max(count, 1)));
    const found = [];
    for (let e = Math.ceil(first / stride) * stride; e <= last; e += stride) found.push(10 ** e);
    if (last - first >= 2.5 || found.length > 3) return found;
    const between = [];
    for (let e = Math.floor(first); e <= last; e++)
      for (const factor of [1, 2, 5]) if (factor * 10 ** e >= low && factor * 10 ** e <= high) between.push(Number((factor * 10 ** e).toPrecision(3)));
    if (between.length >= 2) return between.length <= 2 * count ? between : found;
    return linearTicks(low, high, count);
  }

  const cut = (text, limit) => {
    if (text.length <= limit) return text;
    const tail = Math.ceil((limit - 1) / 2);
    return text.slice(0, limit - 1 - tail) + "…" + text.slice(text.length - tail);
  };

  // Parts of a dotted name, the first `count` of them as initials; numbers stay.
  const abbreviate = (parts, count) =>
    parts.map((part, i) => (i < count && i < parts.length - 1 && !/^\d*$/.test(part) ? [...part][0] : part)).join(".");

  // How many leading parts all names share; at least one part of each is left.
  function shared(split) {
    let count = 0;
    while (split.every((parts) => parts.length > count + 1 && parts[count] === split[0][count])) count++;
    return count;
  }

  // Names within about `limit` characters, different for different names. Leading parts that all share are left out, then
  // leading parts become initials, as many as needed, the same for all; then the middle is cut, and what agrees is numbered.
  // bert.encoder.layer.11.attention.self.query → …11.attention.self.query → …11.a.s.query
  function shorten(names, limit = 40) {
    const split = names.map((name) => name.split("."));
    const long = (texts) => texts.some((text) => text.length > limit);
    let short = names;
    if (long(short)) {
      const skip = names.length > 1 ? shared(split) : 0, rest = split.map((parts) => parts.slice(skip));
      const depth = Math.max(...rest.map((parts) => parts.length));
      for (let count = 0; count < depth && (count === 0 || long(short)); count++)
        short = rest.map((parts) => (skip ? "…" : "") + abbreviate(parts, count));
    }
    short = short.map((text) => cut(text, limit));
    const count = new Map();
    short.forEach((one, i) => count.set(one, (count.get(one) || new Set()).add(names[i])));
    const taken = new Set(short.filter((one) => count.get(one).size === 1));
    return short.map((one, i) => {
      if (count.get(one).size === 1) return one;
      let made = `${i + 1} ${cut(names[i], limit)}`;
      while (taken.has(made)) made += "'";
      taken.add(made);
      return made;
    });
  }

  return { number, power, linearTicks, logTicks, shorten, cut, thousands: (n) => Number(n).toLocaleString("en-US") };
})();
