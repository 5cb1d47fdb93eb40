"use strict";
// Hides what is filtered out, sorts the list, and counts again. The page is complete without it.
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const fields = all("[data-filter]");
  const cases = all(".case");
  const chips = all(".map .chip");
  const list = document.getElementById("list");
  const first = [...cases];

  const fits = (element) =>
    fields.every((field) => {
      const wanted = field.value.trim();
      if (!wanted) return true;
      const has = element.dataset[field.dataset.filter];
      return field.dataset.filter === "text"
        ? wanted.toLowerCase().split(/\s+/).every((word) => has.includes(word))
        : has === wanted;
    });
  const mean = (values) => Math.exp(values.reduce((sum, value) => sum + Math.log(value), 0) / values.length);
  const numbers = (elements, name) => elements.map((e) => e.dataset[name]).filter((text) => text).map(Number);
  const write = (key, text) => {
    const place = document.getElementById(`figure-${key}`);
    if (place) place.textContent = text;
  };

  const show = () => {
    for (const element of [...cases, ...chips]) element.hidden = !fits(element);
    for (const map of all(".map")) map.hidden = !map.querySelector(".chip:not([hidden])");
    const visible = cases.filter((element) => !element.hidden);
    const gains = numbers(visible, "speedup");
    const ratios = numbers(visible, "ratio");
    write("count", visible.length);
    write("speedup", gains.length ? `${mean(gains).toFixed(2)}×` : "–");
    const whole = numbers(visible, "fastest");
    write("ratio", ratios.length ? mean(ratios).toFixed(3) : "–");
    write("fastest", whole.length ? mean(whole).toFixed(3) : "–");
    write("farthest", whole.length ? Math.max(...whole).toFixed(2) : "–");
    document.getElementById("shown").textContent = `${visible.length} of ${cases.length}`;
  };
  const sort = (how) => {
    const by = {
      speedup: (a, b) => Number(b.dataset.speedup) - Number(a.dataset.speedup),
      slow: (a, b) => Number(a.dataset.speedup || Infinity) - Number(b.dataset.speedup || Infinity),
      ratio: (a, b) => Number(b.dataset.ratio) - Number(a.dataset.ratio),
    }[how];
    list.append(...(by ? [...cases].sort(by) : first));
  };
  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target && target.matches(".case")) target.open = true;
  };

  for (const field of fields) field.addEventListener("input", show);
  document.getElementById("order").addEventListener("input", (event) => sort(event.target.value));
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", open);
  show();
  open();
})();
